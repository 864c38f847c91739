"""Rerankers by family: how a query and a document become a prompt, and a logit a relevance."""
