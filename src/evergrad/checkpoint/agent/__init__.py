"""The agent: finishes captured shards, even if the trainer is killed.

agent.py        the process: one per node and job, its socket and its lifetime
pipeline.py     the stages of a shard: digest, memory, local, upload, commit; and which arenas are free
inventory.py    which versions the tiers hold, which are complete, which are retired
upload_dedup.py       replicated tensors are uploaded once, in balanced parts
client.py       the trainer's end: a connection to the agent, or a thread that does its work
events.py       the messages from agent to trainers
"""

__all__: list[str] = []
