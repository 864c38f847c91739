"""How work on text is interrupted: it asks before every piece of it."""


class Turns:
    """Work that nobody interrupts; a server's own kind makes jobs take turns and gives them up."""

    def before(self, characters: int) -> None:
        """To be called before a piece of work about as long as tokenising so many characters.

        May wait until it is this job's turn.

        Raises:
            DeadlineExceeded: nobody waits for the result any more.
        """


ALONE = Turns()
COPIED = 16  # tokens or characters that are copied or searched in the time that one is tokenised
