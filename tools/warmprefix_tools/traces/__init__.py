"""Reading and recording retrieval traces."""
