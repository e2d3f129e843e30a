"""The `warmprefix` command and its tools. They use only public names of the core."""
