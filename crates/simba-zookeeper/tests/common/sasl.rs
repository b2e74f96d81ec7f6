//! A server that requires a login.

use std::path::Path;

use simba_servers::{Server, Setup};

pub(crate) const SASL_PASSWORD: &str = "canary-sasl";

/// Writes the file with the users of a server, which it reads when it starts.
pub(crate) fn write_users(file: &Path, password: &str) {
    let module = "org.apache.zookeeper.server.auth.DigestLoginModule";
    std::fs::write(file, format!("Server {{ {module} required user_tck=\"{password}\"; }};\n")).unwrap();
}

/// Starts a server that requires a password.
pub(crate) fn sasl_server(dir: &Path) -> Server {
    let users = dir.join("users");
    write_users(&users, SASL_PASSWORD);
    Setup::zookeeper()
        .with_setting("authProvider.1=org.apache.zookeeper.server.auth.SASLAuthenticationProvider")
        .with_setting("enforce.auth.enabled=true")
        .with_setting("enforce.auth.schemes=sasl")
        .with_env("JDK_JAVA_OPTIONS", format!("-Djava.security.auth.login.config={}", users.display()))
        .start()
        .unwrap()
}
