//! Redis, in memory only.

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::process::Command;

use anyhow::Result;

use super::{Instance, Kind, expect};
use crate::setup::free_address;

pub(crate) const KIND: Kind = Kind {
    name: "redis",
    programs: &[("redis-server", "redis-server")],
    user: None,
    prepare,
    command,
    url: |instance| format!("redis://{}", instance.address),
    probe,
};

fn command(instance: &Instance) -> Result<Command> {
    let mut command = instance.program("redis-server")?;
    command.args(["--bind", &instance.address.ip().to_string(), "--port", &instance.port()]);
    command.arg("--dir").arg(&instance.dir);
    command.args(["--save", "", "--appendonly", "no", "--daemonize", "no"]);
    if instance.tls {
        command.args(["--tls-port", fs::read_to_string(instance.path(TLS_PORT))?.trim()]);
        command.args(["--tls-ca-cert-file", "ca.pem", "--tls-cert-file", "server.pem"]);
        command.args(["--tls-key-file", "server.key", "--tls-auth-clients", "optional"]);
    }
    Ok(command)
}

/// The file with the TLS port; the server reports it by `CONFIG GET tls-port`.
const TLS_PORT: &str = "tls-port";

fn prepare(instance: &Instance) -> Result<()> {
    match instance.tls {
        true => instance.write(TLS_PORT, &free_address()?.port().to_string()),
        false => Ok(()),
    }
}

/// Succeeds when a PING is answered.
pub(super) fn probe(instance: &Instance) -> io::Result<()> {
    ping(instance.address)
}

pub(super) fn ping(address: SocketAddr) -> io::Result<()> {
    expect(address, "PING\r\n", "+PONG\r\n")
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::TcpListener;
    use std::thread;

    use super::*;

    /// Returns the result of the probe for a server that sends this.
    fn probe_of(answer: &'static [u8]) -> io::Result<()> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let server = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(answer).unwrap();
            stream.read_exact(&mut [0; 6]).unwrap();
        });
        let dir = std::env::temp_dir();
        let settings = Vec::new();
        let instance = Instance {
            dir,
            disk: None,
            address,
            tls: false,
            zone: None,
            upstream: None,
            settings,
            login: None,
        };
        let outcome = probe(&instance);
        server.join().unwrap();
        outcome
    }

    #[test]
    fn pong_means_ready() {
        probe_of(b"+PONG\r\n").unwrap();
    }

    #[test]
    fn error_contains_any_other_answer() {
        let error = probe_of(b"-LOADING Redis is loading the dataset\r\n").unwrap_err();
        assert!(error.to_string().contains("-LOADIN"), "{error}");
    }
}
