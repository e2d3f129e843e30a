"""A RAG service: FastAPI, LangChain, a planner shared through Redis, and the gateway in front of the engine."""
