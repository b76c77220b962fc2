"""Serve a trained model with OpenAI's HTTP API: checks in front of the server of transformers."""
