"""Ray: engines on the nodes of a cluster."""
