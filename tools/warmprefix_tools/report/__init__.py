"""Self-contained HTML pages with charts, readable on a phone, in the dark and on paper. No script, no request."""
