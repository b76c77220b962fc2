"""A trained model behind the addresses of OpenAI's HTTP interface: what stands before and behind a server of others."""
