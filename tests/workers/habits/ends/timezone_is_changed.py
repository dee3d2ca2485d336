import os
import time

os.environ["TZ"] = "Asia/Tokyo"
time.tzset()
print(time.tzname, time.localtime(0).tm_hour)
