"""A run to the Hub: its card, the files that go there, the upload. Reads run directories, never loads torch."""
