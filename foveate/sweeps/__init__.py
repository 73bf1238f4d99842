"""Many runs: jobs, and the engines that perform them."""
