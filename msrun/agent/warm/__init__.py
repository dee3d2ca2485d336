"""Warm servers: processes that have imported already, kept between jobs, and fork the fork server of the next one."""
