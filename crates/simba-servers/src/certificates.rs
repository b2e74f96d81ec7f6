//! Two test authorities, and certificates signed by the first.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};

/// The only host name in the server's certificate; its address is not in it.
const HOST: &str = "localhost";

/// A directory with certificates and keys in PEM form.
///
/// | file | content |
/// |---|---|
/// | `ca.pem` | the authority that signed the two below |
/// | `other-ca.pem` | an authority that signed neither |
/// | `server.pem`, `server.key` | for the server, valid for `localhost` and no address |
/// | `client.pem`, `client.key` | for a client |
#[derive(Clone, Debug)]
pub struct Certificates {
    dir: PathBuf,
}

impl Certificates {
    /// Creates new certificates in this directory, unless it already has some.
    ///
    /// # Errors
    ///
    /// The directory cannot be written to.
    pub fn create(dir: &Path) -> Result<Self> {
        let this = Self { dir: dir.to_owned() };
        if !this.path("client.key").exists() {
            fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
            this.write_all()?;
        }
        Ok(this)
    }

    /// Returns the path of a file.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    fn write_all(&self) -> Result<()> {
        let (ours, issuer) = authority("Simba's test authority")?;
        self.write("ca.pem", &ours)?;
        self.write("other-ca.pem", &authority("Another test authority")?.0)?;
        for (name, purpose) in
            [("server", ExtendedKeyUsagePurpose::ServerAuth), ("client", ExtendedKeyUsagePurpose::ClientAuth)]
        {
            let mut params = CertificateParams::new(vec![HOST.to_owned()])?;
            params.distinguished_name.push(DnType::CommonName, format!("simba {name}"));
            params.extended_key_usages.push(purpose);
            let key = KeyPair::generate()?;
            self.write(&format!("{name}.pem"), &params.signed_by(&key, &issuer)?.pem())?;
            self.write(&format!("{name}.key"), &key.serialize_pem())?;
        }
        Ok(())
    }

    /// Writes a file. Keys are readable by their owner only, which servers require.
    fn write(&self, name: &str, pem: &str) -> Result<()> {
        let path = self.path(name);
        fs::write(&path, pem).with_context(|| format!("cannot write {}", path.display()))?;
        let mode = if name.ends_with(".key") { 0o600 } else { 0o644 };
        Ok(fs::set_permissions(&path, fs::Permissions::from_mode(mode))?)
    }
}

fn authority(name: &str) -> Result<(String, Issuer<'static, KeyPair>)> {
    let mut params = CertificateParams::new(Vec::new())?;
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.distinguished_name.push(DnType::CommonName, name);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let key = KeyPair::generate()?;
    let certificate = params.self_signed(&key)?;
    Ok((certificate.pem(), Issuer::new(params, key)))
}
