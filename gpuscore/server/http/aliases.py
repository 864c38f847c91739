"""Further paths of our routes, for callers that choose the path themselves (`--path-alias`).

A path is replaced by its route where a request comes in, so limits, keys, errors and metrics are
the route's own.
"""

import re
from collections.abc import Mapping

from gpuscore.config import ServerConfig
from gpuscore.dialects.paths import GENERATING_PATHS, GROUPS, OPEN_PATHS, PROBE_PATHS
from gpuscore.dialects.table import DIALECT_OF
from gpuscore.errors import ConfigError

# Routes that may have other paths. Others are left out: callers who may use the platform's paths
# must not read there what the server tells its operator.
ROUTES = (*(path for path in DIALECT_OF if path not in GENERATING_PATHS), *PROBE_PATHS)
_EXISTING = {*DIALECT_OF, *OPEN_PATHS, *(path for group in GROUPS.values() for path in group)}
_FILES = ("/docs/", "/ui/")  # folders of the pages' files
# As `read_target` returns paths, without "," and "=", which separate aliases and their parts.
_PATH = re.compile(r"/[A-Za-z0-9._~!$&'()*+;:@/-]*")


def read_aliases(config: ServerConfig) -> Mapping[str, str]:
    """Return the route of each further path.

    Raises:
        ConfigError: a path is malformed, comes twice or is one of the server's own, or its route
            is none of ROUTES.
    """
    aliases: dict[str, str] = {}
    for text in config.path_aliases.split(",") if config.path_aliases else ():
        path, _, route = text.strip().partition("=")
        taken = path in _EXISTING or path in aliases or path.startswith(_FILES)
        if taken or route not in ROUTES or not _PATH.fullmatch(path):
            why = f"{path} is a path of the server already; it " if taken else ""
            raise ConfigError(
                f"--path-alias {text}: {why}must be PATH=ROUTE, such as /ping=/ready; PATH begins "
                "with / and has no query, "
                f"percent-encoding or comma; ROUTE is one of {', '.join(ROUTES)}"
            )
        aliases[path] = route
    return aliases
