"""The cluster exporter: what only the API server still knows once a pod is gone."""
