"""`warmprefix quality`: what orders, notes and references do to a model's answers."""
