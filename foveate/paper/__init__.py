"""All that is about the paper of Jansson and Lindeberg: its tables, its claims, its networks."""
