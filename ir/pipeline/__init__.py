"""Pipeline schedules: order of work, time, memory and exchange of each device."""
