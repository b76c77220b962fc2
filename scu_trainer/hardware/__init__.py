"""What this machine has, what a job needs, and what to set."""
