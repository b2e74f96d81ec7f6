SELECT m.owner, m.session, m.token, m.until, statement_timestamp() FROM {mutex} m WHERE m.mutex = $1
