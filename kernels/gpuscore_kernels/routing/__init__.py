from gpuscore_kernels.routing.api import Routing, route

__all__ = ["Routing", "route"]
