"""Jobs of Kubernetes: the text that is applied. pod, job and completion in its own sense."""
