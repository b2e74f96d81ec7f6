-- Frees the mutex if its holder is the one of id $2 (null: any) and token $3 (null: any). Tells who held it.
WITH holder AS (
    SELECT h.mutex, h.owner, h.token, h.until FROM {mutex} h
    WHERE {bound} h.mutex = $1 AND h.until > clock_timestamp() FOR UPDATE
), freed AS (
    UPDATE {mutex} m SET owner = '', session = '', ttl_at = 'epoch', until = 'epoch'
    FROM holder
    WHERE m.mutex = holder.mutex AND ($2::text IS NULL OR holder.owner = $2)
        AND ($3::bigint IS NULL OR holder.token = $3)
    RETURNING m.mutex
)
SELECT holder.owner, holder.until, clock_timestamp(), EXISTS (SELECT FROM freed) FROM holder
