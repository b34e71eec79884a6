"""The torch half: stages, transports, executor and the bridge to the caller."""
