"""The pure half: graphs, actions, schedules, their laws.  Imports no torch, reads no clock."""
