import sys

from kernel_code.check import main

sys.exit(main())
