"""Push a run to the Hub: its model card, the choice of files, the upload. Reads run directories, never loads torch."""
