"""Where snapshots lie: folders and object stores, what is durable, what is kept, who may write."""
