"""Session: snapshots, agreed stops and progress for your own training loop. Read session.py first."""
