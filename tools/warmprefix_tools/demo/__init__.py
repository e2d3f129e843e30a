"""`warmprefix demo`: real text, a real retriever, and the prefill that warmprefix saves, as the engine reports it."""
