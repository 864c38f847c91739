"""What every client asks. The demo model knows chairs, lamps and scarves."""

QUERY = "a blue wooden chair for the garden"
DOCUMENTS = (
    "A red steel lamp.",
    "A wooden garden chair in blue.",
    "A blue wool scarf.",
    "A wooden chair.",
    "A green rug.",
)
