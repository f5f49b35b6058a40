//! Authorities and certificates for tests.

use super::*;
use graviola::signing::eddsa::Ed25519SigningKey;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyIdMethod,
    PublicKeyData, SanType, SignatureAlgorithm, SigningKey, date_time_ymd,
};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

pub(in crate::bootstrap) struct Key(Ed25519SigningKey, [u8; 32]);

impl Key {
    fn new() -> Self {
        let key = Ed25519SigningKey::generate().unwrap();
        let public = key.public_key().as_bytes();
        Key(key, public)
    }
}

impl PublicKeyData for Key {
    fn der_bytes(&self) -> &[u8] {
        &self.1
    }

    fn algorithm(&self) -> &'static SignatureAlgorithm {
        &rcgen::PKCS_ED25519
    }
}

impl SigningKey for Key {
    fn sign(&self, message: &[u8]) -> Result<Vec<u8>, rcgen::Error> {
        Ok(self.0.sign(message).to_vec())
    }
}

/// An authority with a file of its certificate.
pub(in crate::bootstrap) struct Authority {
    issuer: Issuer<'static, Key>,
    pem: String,
}

impl Authority {
    pub(in crate::bootstrap) fn new() -> Self {
        let key = Key::new();
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.serial_number = Some(1u64.into());
        params.key_identifier_method = KeyIdMethod::PreSpecified(key.1[..20].to_vec());
        let pem = params.self_signed(&key).unwrap().pem();
        Authority { issuer: Issuer::new(params, key), pem }
    }

    /// An authority whose certificate this one has signed.
    pub(in crate::bootstrap) fn below(&self, number: usize) -> Authority {
        let key = Key::new();
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, format!("between {number}"));
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.serial_number = Some((number as u64 + 2).into());
        params.key_identifier_method = KeyIdMethod::PreSpecified(key.1[..20].to_vec());
        let pem = params.signed_by(&key, &self.issuer).unwrap().pem();
        Authority { issuer: Issuer::new(params, key), pem }
    }

    pub(in crate::bootstrap) fn certificate(&self) -> CertificateDer<'static> {
        CertificateDer::from_pem_slice(self.pem.as_bytes()).unwrap()
    }

    /// Writes the files of a member, whose certificate has `uri` as its name and holds until a time
    /// since 1970.
    pub(in crate::bootstrap) fn issue(&self, folder: &Path, uri: &str, until: Duration) -> TlsFiles {
        let key = Key::new();
        let mut params = CertificateParams::default();
        params.not_after = date_time_ymd(1970, 1, 1) + until;
        params.serial_number = Some(u64::from(u32::from_ne_bytes([key.1[0], key.1[1], key.1[2], 0])).into());
        params.subject_alt_names = vec![SanType::URI(uri.try_into().unwrap())];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let certificate = params.signed_by(&key, &self.issuer).unwrap().pem();
        let mut der = [0; 128];
        let der = key.0.to_pkcs8_der(&mut der).unwrap();
        let files = ["ca.pem", "own.pem", "own.key"].map(|name| folder.join(name));
        let [ca, own, private] = files;
        write(&ca, self.pem.as_bytes());
        write(&own, certificate.as_bytes());
        write(&private, pem("PRIVATE KEY", der).as_bytes());
        TlsFiles { ca, certificate: own, key: private }
    }

    /// The same for worker `task`.
    pub(in crate::bootstrap) fn worker(&self, folder: &Path, task: u32) -> TlsFiles {
        let in_2500_years = Duration::from_secs(2500 * 365 * 24 * 3600);
        self.issue(folder, &format!("tensorwire:worker/{task}"), in_2500_years)
    }

    /// Writes the authority's certificate in place of a file.
    pub(in crate::bootstrap) fn replace(&self, ca: &Path) {
        write(ca, self.pem.as_bytes());
    }

    /// Adds the authority's certificate to a file that has another's.
    pub(in crate::bootstrap) fn add(&self, ca: &Path) {
        let others = fs::read_to_string(ca).unwrap();
        write(ca, (others + &self.pem).as_bytes());
    }
}

/// Writes a file that only its owner can read, in place of an earlier one.
pub(in crate::bootstrap) fn write(path: &Path, bytes: &[u8]) {
    let fresh = path.with_extension("fresh");
    drop(fs::remove_file(&fresh));
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&fresh).unwrap();
    file.write_all(bytes).unwrap();
    fs::rename(fresh, path).unwrap();
}

fn pem(label: &str, der: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let text: String = der
        .chunks(3)
        .flat_map(|part| {
            let word =
                part.iter().fold(0, |word, byte| word << 8 | u32::from(*byte)) << (8 * (3 - part.len()));
            let digit = move |n: usize| DIGITS[(word >> (18 - 6 * n)) as usize & 63] as char;
            (0..4).map(move |n| if n <= part.len() { digit(n) } else { '=' })
        })
        .collect();
    format!("-----BEGIN {label}-----\n{text}\n-----END {label}-----\n")
}
