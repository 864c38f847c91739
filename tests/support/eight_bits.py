"""Skip what computes in INT8 where this CPU's sums of it overflow, which gpuscore refuses."""

import pytest

from gpuscore.backends.torch.linear import exact_on_this_cpu

needs_int8 = pytest.mark.skipif(
    not exact_on_this_cpu(), reason="this CPU has neither VNNI nor AMX, so INT8 is refused here"
)
