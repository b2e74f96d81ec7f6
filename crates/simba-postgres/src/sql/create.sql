-- Makes the mutex and takes it, if nobody ever used it.
INSERT INTO {mutex} (mutex, owner, session, token, acquired_at, renewed_at, ttl_at, until)
SELECT $1, $2, $3, {micros}, statement_timestamp(), statement_timestamp(),
    statement_timestamp() + make_interval(secs => $4), statement_timestamp() + make_interval(secs => $5)
WHERE {bound} true
ON CONFLICT (mutex) DO NOTHING
RETURNING token
