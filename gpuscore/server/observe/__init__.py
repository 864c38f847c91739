"""What is told of requests: records, metrics, log lines, spans."""
