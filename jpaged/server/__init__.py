"""Owns the server: OpenAI's protocol over HTTP, in front of an engine that runs in a thread of its own."""
