"""Which blocks the prompt already holds: by the seen-block record (`exact`), or by the messages (`history`)."""
