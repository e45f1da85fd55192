"""The measurement of an OpenAI server from outside: what is sent to it, when, and what came back how fast."""
