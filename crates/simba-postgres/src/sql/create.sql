-- Makes the mutex and takes it, if nobody ever used it.
INSERT INTO {mutex} (mutex, owner, session, token, acquired_at, renewed_at, ttl_at, until)
SELECT $1, $2, $3, {micros}, clock_timestamp(), clock_timestamp(),
    clock_timestamp() + make_interval(secs => $4), clock_timestamp() + make_interval(secs => $5)
WHERE {bound} {synced} true
ON CONFLICT (mutex) DO NOTHING
RETURNING token
