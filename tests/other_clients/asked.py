"""The query and the documents that every client sends. The demo model knows chairs, lamps and
scarves."""

QUERY = "a blue wooden chair for the garden"
DOCUMENTS = (
    "A red steel lamp.",
    "A wooden garden chair in blue.",
    "A blue wool scarf.",
    "A wooden chair.",
    "A green rug.",
)
