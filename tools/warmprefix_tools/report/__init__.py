"""Reports: numbers as text, and self-contained HTML pages from Jinja templates."""
