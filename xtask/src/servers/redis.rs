//! Redis, in memory only.

use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use super::Server;

pub(super) const SERVER: Server = Server {
    name: "redis",
    variable: "SIMBA_TCK_REDIS",
    package: "redis-server",
    program: "redis-server",
    configure,
    url: |address| format!("redis://{address}"),
    probe,
};

fn configure(command: &mut Command, address: SocketAddr, dir: &Path) {
    command.args(["--bind", &address.ip().to_string(), "--port", &address.port().to_string()]);
    command.arg("--dir").arg(dir);
    command.args(["--save", "", "--appendonly", "no", "--daemonize", "no"]);
}

/// Succeeds when a PING is answered.
fn probe(address: SocketAddr) -> io::Result<()> {
    const PATIENCE: Duration = Duration::from_secs(1);
    const PONG: &[u8] = b"+PONG\r\n";
    let mut stream = TcpStream::connect_timeout(&address, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.write_all(b"PING\r\n")?;
    let mut answer = [0; PONG.len()];
    stream.read_exact(&mut answer)?;
    if answer != PONG {
        let answer = String::from_utf8_lossy(&answer);
        return Err(io::Error::other(format!("the answer to PING is {answer:?}")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::thread;

    use super::super::loopback;
    use super::*;

    /// What the probe makes of a server that sends this.
    fn probe_of(answer: &'static [u8]) -> io::Result<()> {
        let listener = TcpListener::bind(loopback(0)).unwrap();
        let address = listener.local_addr().unwrap();
        let server = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(answer).unwrap();
            stream.read_exact(&mut [0; 6]).unwrap();
        });
        let outcome = probe(address);
        server.join().unwrap();
        outcome
    }

    #[test]
    fn a_pong_is_a_server_that_serves() {
        probe_of(b"+PONG\r\n").unwrap();
    }

    #[test]
    fn any_other_answer_is_told() {
        let error = probe_of(b"-LOADING Redis is loading the dataset\r\n").unwrap_err();
        assert!(error.to_string().contains("-LOADIN"), "{error}");
    }
}
