"""Grafana dashboards as code; `make generate` writes them as JSON for the chart."""
