"""From a plan to the scripts that are sent to nodes."""
