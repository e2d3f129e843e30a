"""The path of a KV event: decoded, put in order, applied to an index, and reported as resident context blocks.

`kv_events` decodes messages, `subscription` receives them without gaps, `kv_index` applies them, `prompt_tree` finds
the prompts that they concern, and `kv_feed` notifies the planner. `spans` finds context blocks in prompts.
"""
