"""What a run tells Prometheus: the table of metrics, the ranks' snapshots and the endpoints that serve them."""
