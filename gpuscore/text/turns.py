"""The handle by which a scheduler can pause or stop work on long texts between two pieces."""


class Turns:
    """A cooperative scheduler's handle; this base class has no scheduler and never waits.

    Work on long text calls `before` before each piece. The server's subclass then may run other
    requests' text work first, and stops the work of a request that was given up.
    """

    def before(self, characters: int) -> None:
        """Announce a piece of work that takes as long as tokenising `characters` characters.

        The call may block while the text work of other requests runs.

        Raises:
            DeadlineExceeded: the request was given up; its work must stop.
        """


ALONE = Turns()  # for callers without a scheduler
COPIED = 16  # tokens or characters that are copied or searched in the time that one is tokenised
