"""Exporters of planner metrics, `prometheus` and `opentelemetry`, each with an extra of its name; trace files."""
