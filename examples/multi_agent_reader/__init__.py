"""Several agents read a folder of documents; a document goes to the agent whose engine has it cached."""
