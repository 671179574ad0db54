"""What ranks exchange on the host: who they are, what they agree on, and who is late."""
