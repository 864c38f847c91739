"""Observation of requests: records, metrics, log lines and traces."""
