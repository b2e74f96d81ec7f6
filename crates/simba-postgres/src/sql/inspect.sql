SELECT m.owner, m.session, m.token, m.until, clock_timestamp() FROM {mutex} m WHERE m.mutex = $1
